"""Where a model comes from and the form everything loads. Light: the modules are imported when used."""
