"""The page: the state of the cluster in a browser, live, and the few requests that change it.

- `watcher`: follows the master for all viewers. `views`: what each of them sees, encoded once. The load on the
  master does not grow with the number of viewers.
- `session`: tickets, cookies and who a viewer is. `guard`: hosts, origins and headers, before anything else.
- `routes`: JSON and the stream. `worker_data`: logs, curves and stacks in the form that a browser shows.
"""
