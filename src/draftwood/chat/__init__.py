"""`draftwood chat`: a conversation with a model in the terminal.

`conversation` holds messages, `layout` turns them into tokens and tokens into text, `session` gets replies from an
engine, `commands` and `repl` are the dialogue, `screen` is the terminal or pipe. How tokens are chosen is the engine's.
"""
