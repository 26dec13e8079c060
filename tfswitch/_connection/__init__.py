"""How a process finds servers, proves who it is, and asks them."""
