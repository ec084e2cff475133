"""How each event changes the world, a file for each kind of noun. Every function takes any world and any event.

A handler answers with the changed world, or with a sentence that says why the event changes nothing.
"""
