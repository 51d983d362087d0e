"""The `tandem` command: everything for people, and no process of a job."""
