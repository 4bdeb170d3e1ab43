"""The Tandem API (`tandem.dev/v1alpha1`): pure models and what follows from them. No I/O."""
