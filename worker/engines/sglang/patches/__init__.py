"""Corrections of SGLang's CPU build. The plugin loads them where SGLang runs on a CPU, and nowhere else."""
