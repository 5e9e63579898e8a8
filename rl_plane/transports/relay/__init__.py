"""Every host a source: who reads which bucket from whom. Pure: no clock, no I/O."""
