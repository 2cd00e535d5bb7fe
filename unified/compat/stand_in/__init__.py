"""A folder for `PYTHONPATH`: its modules bring the aliases to processes that have not imported `unified` yet.

A process that `multiprocessing` spawns imports its script by path. A process started with `sys.executable` imports any
module. Neither knows of `unified.compat`. Only in such processes, ``import dlrover`` finds `dlrover` of this folder,
which replaces itself by the alias or by the real package.
"""
