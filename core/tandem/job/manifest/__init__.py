"""The manifest of a job: parses YAML into a job, or into the list of all its errors.

source     YAML as kubectl reads it, with the position of every value, and messages for its syntax errors
fields     every field of a job, as one tree derived from its models
reading    parses a manifest, with overrides of the command line, into a job, and describes pydantic's errors
rewriting  rewrites a manifest with `spec.trainer.config`
"""
