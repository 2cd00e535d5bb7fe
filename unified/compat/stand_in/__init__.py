"""A folder for `PYTHONPATH`: its modules bring the aliases to processes that import nothing of `unified` before them.

A process that `multiprocessing` spawns imports its script by its path, and one that is started with `sys.executable`
any module; neither knows of `unified.compat`. There, and only there, ``import dlrover`` finds `dlrover` of this
folder, which gives way to the alias, or to the real package.
"""
