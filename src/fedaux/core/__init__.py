"""The paper: methods, messages, local training, teachers, distillation, and the round."""
