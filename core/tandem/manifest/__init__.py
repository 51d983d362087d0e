"""The manifest of a job: parses YAML into a job, or into the list of all its errors.

source     YAML as kubectl reads it, with the place of every value
syntax     what is wrong with the YAML itself, in words
fields     every field that there may be, as one tree read off the models of the job
overrides  settings of the command line that change it
reading    from a manifest to a job
wording    what pydantic found wrong, in words
"""
