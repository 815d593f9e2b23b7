"""Being here, it lets tests of every folder import the helpers that lie beside it."""
