"""The controller part: volumes as the CO asks for them. It writes the volume records and touches no device."""
