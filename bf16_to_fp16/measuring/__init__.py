"""Run stock models, measure every operation in each way of using fp16, and compare their outputs with the source's."""
