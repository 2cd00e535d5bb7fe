"""Remote calls: the client's pending calls, the server's handlers, dispatch, retry and deadlock detection."""
