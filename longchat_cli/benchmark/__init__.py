"""`longchat bench`: how fast longchat is, beside another program on the same files, and against the machine.

Every measurement runs in a process of its own, longchat's and the other's in turn.
"""
