"""The control daemon: decides where and when workers live, and touches no tensor."""
