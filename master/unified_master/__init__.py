"""The control daemon: decides where and when workers run, and touches no tensor."""
