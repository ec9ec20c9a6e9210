"""`longchat doctor`."""

from __future__ import annotations

import json
from typing import Any

import click

from longchat_cli.commands.framework import command


@command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--kernels", is_flag=True, help="Compile the GPU kernels (no GPU needed) and show their costs.")
def doctor(as_json: bool, kernels: bool) -> None:
    """What runs here: device, kernels, model, directories, versions."""
    from longchat_cli import doctor as diagnosis

    report: Any = diagnosis.kernel_costs() if kernels else diagnosis.examine()
    show: Any = diagnosis.show_costs if kernels else diagnosis.show
    click.echo(json.dumps(report, ensure_ascii=False, indent=2) if as_json else show(report))
