"""The settings of tables: their ranges, and the objects that hold them."""
