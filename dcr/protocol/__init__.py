"""Rules without IO."""
