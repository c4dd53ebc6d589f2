"""Parallelism of experts: the ranks of the axes data, context and tensor share the experts of a mixture.

The R = data x context x tensor ranks of one copy of a stage, tensor innermost, are cut into groups of E = mesh.expert
neighbours, each of which has all experts. Rank p of them has experts ``e * n / E`` to ``(e + 1) * n / E - 1`` of n, with
``e = p mod E``; the R / E ranks of one e have the same ones: their gradients are summed, and ZeRO shards them. Eight
ranks, data 2 x context 2 x tensor 2, with E = 4 and eight experts:

    rank          0     1     2     3     4     5     6     7
    data          0     0     0     0     1     1     1     1
    context       0     0     1     1     0     0     1     1
    tensor        0     1     0     1     0     1     0     1
    expert        0     1     2     3     0     1     2     3      p mod E
    expert_data   0     0     0     0     1     1     1     1      p div E
    experts      0,1   2,3   4,5   6,7   0,1   2,3   4,5   6,7
"""
