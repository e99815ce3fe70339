"""Training a DFlash drafter for any target the engine loads: `draftwood train drafter`.

data          prompts from files, bad lines reported     kernels   static-shape, differentiable stand-ins
sampler       the target's own continuations, batched    blocks    anchors, labels, loss
folder        a drafter folder, written and initialised  evaluation  accept lengths, chain and trees
trainer       the loop, its checkpoints and schedule     report    plot and model card
scoring       a drafter's score rule, fitted             run, cli  from folder to folder
"""
