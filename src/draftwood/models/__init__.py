"""The target (MLA + MoE) and the DFlash drafter, read from Hugging Face folders."""
