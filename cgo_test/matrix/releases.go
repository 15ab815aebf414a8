package main

// Releases of NIXL that the binding is tested with, oldest first, with the SHA-256 of the CPython 3.12 wheels: only their C
// libraries are used.
var releases = []release{
	{"0.10.1", map[string]string{
		"amd64": "26e59f9841985cf5b547202865036f84ae6dc23184789446fe5833e7499e21a9",
		"arm64": "b4712c6e0f18f57fee34cd970faac01480f0caf12da33d4a40ef4e9096a4caf7",
	}},
	{"1.0.1", map[string]string{
		"amd64": "0143bc14d7b969c7519639821c126d3ba47cbaf38281c5d85656a348f65e06a4",
		"arm64": "e2fef21327f5ddf715e00b73ab7e1eac8cf8a529d18590f010cbbc22792e71a6",
	}},
	{"1.2.0", map[string]string{
		"amd64": "ca2f2c387e0bb7f448922212cf0d6485e051289cf9c1b67f1ee4cb2ffd327c51",
		"arm64": "af1b3622caf5850b0b8618118090d50921d9ec3dbe506484886045a7c8108417",
	}},
	{"1.3.2", map[string]string{
		"amd64": "ef8ccdffcd54978e8a799de59287efcb3af0b7ba3bf02e04bc4df4c842f1f569",
		"arm64": "ea79ec205168cf819614127265ce1fff1e61d9d126d6d56cbd1ecaa29c980723",
	}},
	{"1.4.1", map[string]string{
		"amd64": "bc3d4f99c85375c7836beef3736f038473c183aca16cb115131c61eb7240ba33",
		"arm64": "8e5e42176d521fa01a4d88366f51e5085a0037b049e8c6a1e5e46a46f0aa84c7",
	}},
	{"1.5.0", map[string]string{
		"amd64": "91fe990d3d6b74f3d08ed5275c70251e40a5651e3a6435c0f048a8663e7e0832",
		"arm64": "576c94ae74aa76f8d38b9050a431100f4c3a725ffebee5f8502dd5fdd35cddb3",
	}},
	{"1.5.1", map[string]string{
		"amd64": "a02005f84e498641b8fe02d058fdc6762c99edf7ae6430176d2d16fa57f4fb93",
		"arm64": "98d4b169813a5110842aefc383ba3bf259a886cd09cc9d54c7a6db69bb36de4d",
	}},
}
