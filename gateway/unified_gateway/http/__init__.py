"""HTTP of the API and of the page: admission and limits of requests, their counts, and streams of answers."""
