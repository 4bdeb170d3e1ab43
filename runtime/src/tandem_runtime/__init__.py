"""What runs in the pods: fabric, messenger, engine, server, router; and `tandem up`."""
