"""The benchmark suite: `draftwood bench`, also `python -m draftwood.bench`. docs/bench.md says how it decides.

    cli         the commands                          worker      the measuring process's loop
    options     what commands share                   workbench   inputs, checks and timers of prepared cases
    base_suite  one run, from plan to exit code       makers      processes that make cases ahead, and compile
    suite       what is the kernels' of a run         generate/   `bench generate`, on the same machinery
    state       options, jobs under way, watchers
    catalog     kernels, cases, implementations       timers      CPU blocks, CUDA graphs
    planner     which case next, when to stop         device      names, ceilings, clocks
    countdown   the budget since process start        live        plan and progress while a run lasts
    stats       intervals, drift, verdicts            show        tables, CSV, Markdown
    work        floors, ceilings, suspicion           compare     two runs, or the spread of many
    rows        what is stored of a job               report      the HTML page
    store       JSON lines, fingerprints, resuming    charts      its plots
    supervisor  the worker's life and death           inputs      tensors of a case, carried between processes

The parent process never imports torch. All measuring happens in the worker, which may crash or hang.
"""
