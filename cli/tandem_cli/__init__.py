"""The `tandem` command, and what it is made of: everything that serves people, and no process of a job."""
