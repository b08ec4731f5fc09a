"""Types shared by plug-ins and machinery: samples, external data, losses, families, engines."""
