"""The training API: an HTTP service in front of a cluster, which runs ``POST /train`` as a job.

It is a client of the cluster and keeps no state: each job's payload is an annotation of the job. So a gateway may die,
come back, or be one of several. From the outside in:

- `cli`, `server`: the command `unified-gateway`. `app`: the application object, also for ``uvicorn``.
- `http.admission`: tokens, rates and sizes, before anything reads a request. `routes`: the routes.
- `runs`: the rules (one job per run id, conflicts, resume), and the list of runs that all status reads share.
- `plan`: from a payload to a job's name, environment, labels and annotations. `schemas`: payloads and answers.
- `backend`: the interface of a cluster. `master_backend`: our own master.
"""
