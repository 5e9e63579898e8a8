"""Plans a relay, in which every host is a source: which host reads which bucket from which host. Pure: no clock, no
I/O."""
