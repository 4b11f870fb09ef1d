"""Modules that the tools share; a regular package, so that no installed one of the same name comes first."""
