"""Pages: who owns them, the target's latents and the drafter's context in them."""
