"""keel.compare and keel.sweep: the functions of the public API that start several runs."""
