"""What launches cost: work counted, constants of a device, predictions, and how they are measured."""
