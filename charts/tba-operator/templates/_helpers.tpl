{{- define "tba.name" -}}
{{- if contains "tba" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-tba" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}-operator
{{- end }}

{{- define "tba.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tba.name" .) }}
{{- end }}

{{- define "tba.selector" -}}
app.kubernetes.io/name: tba-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tba.labels" -}}
{{ include "tba.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tba
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tba.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tba.subject" -}}
- kind: ServiceAccount
  name: {{ include "tba.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}
