"""Ray actors, the links between them, and the Serve deployments. Nothing else imports Ray."""
