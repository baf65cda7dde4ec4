"""What a training log says went wrong: its curves read, the events in them found, told and drawn."""
