"""Where elements lie: schema, frames, boxes and tables of boxes. Pure."""
