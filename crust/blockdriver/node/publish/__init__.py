"""NodePublishVolume: on the host, and deferred."""
