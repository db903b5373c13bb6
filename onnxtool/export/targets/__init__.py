"""The consumers of exported models: what each needs, and how a file is made and checked for it."""
