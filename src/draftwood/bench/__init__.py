"""The benchmark suite: `draftwood bench`, also `python -m draftwood.bench`. docs/bench.md says how it decides.

    cli         the commands                          worker      the measuring process's loop
    suite       one run, from plan to exit code       workbench   inputs, checks and timers of prepared cases
    catalog     kernels, cases, implementations       compiling   Triton kernels compiled ahead, in threads
    planner     which case next, when to stop         timers      CPU blocks, CUDA graphs
    countdown   the budget since process start        device      names, ceilings, clocks
    stats       intervals, drift, verdicts            live        plan and progress while a run lasts
    work        floors, ceilings, suspicion           show        tables, CSV, Markdown
    rows        what is stored of a job               compare     two runs, or the spread of many
    store       JSON lines, fingerprints, resuming    report      the HTML page; charts: its plots
    supervisor  the worker's life and death

The parent process never imports torch. All measuring happens in the worker, which may crash or hang.
"""
