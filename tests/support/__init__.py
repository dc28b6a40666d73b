"""What tests of several rooms share: real ends over real directories, models, engines of toys, processes of ranks."""
