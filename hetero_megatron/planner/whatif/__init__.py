"""Planning on other clusters: without some nodes, with more, with slower chips, or for another objective."""
