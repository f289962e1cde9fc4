"""Lengths of real conversations: (prompt tokens, answer tokens), in order of arrival.

The first requests of the Azure LLM inference trace 2023, conversation service, whose prompt and
answer are together at most 2,048 tokens. Licence of the data: CC-BY-4.0,
https://github.com/Azure/AzurePublicDataset. Source: P. Patel, E. Choukse, C. Zhang, A. Shah, I.
Goiri, S. Maleki, R. Bianchini, "Splitwise: Efficient generative LLM inference using phase
splitting", ISCA 2024.
"""

CONVERSATIONS = (
    (374, 44), (396, 109), (879, 55), (91, 16), (91, 16), (381, 84), (1313, 142), (388, 84),
    (242, 14), (209, 152), (394, 124), (394, 59), (1315, 174), (389, 90), (415, 106), (120, 12),
    (369, 74), (206, 162), (1353, 142), (197, 152), (181, 154), (388, 54), (203, 147), (126, 194),
    (389, 87), (91, 16), (181, 123), (191, 217), (27, 183), (203, 217), (398, 81), (126, 172),
)  # fmt: skip
