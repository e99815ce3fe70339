"""The benchmark suite: `draftwood bench`, also `python -m draftwood.bench`. docs/bench.md says how it decides.

    cli        the commands                         report, charts  the HTML page and its plots
    suite      one run, from plan to table          show, compare   tables of stored runs
    catalog    kernels, cases, implementations      store           JSON lines, fingerprints, resuming
    planner    which case next, when to stop        supervisor      the worker process, its life and death
    stats      intervals, drift, verdicts           worker          the loop inside that process
    work       bytes, FLOPs, ceilings, suspicion    workbench       inputs, checks and timers of prepared cases
                                                    timers, device  clocks; what the machine is and can do

The parent process never imports torch. All measuring happens in the worker, which may crash or hang.
"""
