"""`draftwood bench generate`: plain, chain and tree decoding side by side on the same prompts.

cli        the command                          worker     the measuring process's answers
cases      settings, modes, what a run is of    visits     one call of the engine: times, tokens, memory
suite      its part of a run                    prompts    where prompts come from
rows       what is stored of a job              models     the engine measured, real or synthetic
show       its tables                           synthetic  random weights, imposed acceptance
report     its HTML page
"""

KERNEL = "generate"
"""What its rows name as their kernel."""

PLAIN = "plain"
"""The mode that the others are compared with, and whose tokens theirs must be."""
