"""NodePublishVolume: on the host, deferred, and ephemeral volumes that live as long as their publish."""
