"""The commands, by what they are for; `fedaux.cli` lists them."""
