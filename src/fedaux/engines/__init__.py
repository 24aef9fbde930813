"""Who carries out the clients' part."""
