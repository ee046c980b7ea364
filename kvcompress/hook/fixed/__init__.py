"""Forms: a layer's part in a decode step with fixed shapes, one per way in which layers hold and drop tokens."""
