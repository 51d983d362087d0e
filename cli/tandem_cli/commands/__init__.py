"""One module for each command of `tandem`; `tandem_cli.main` lists them."""
