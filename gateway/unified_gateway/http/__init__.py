"""Parts of the gateway that speak HTTP: admission, routes, streams, the server itself."""
